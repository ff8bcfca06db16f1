// What this machine can do at most: bytes read from memory, and multiply-adds from registers.
//
//   gcc -O3 -march=native -ffp-contract=fast -pthread ceilings.c -o ceilings
//   ./ceilings THREADS BYTES...
//
// One line of JSON: {"read": {"BYTES": GB/s, ...}, "fp32": GFLOP/s, "bf16": GFLOP/s, "int8": GOP/s}. bf16 and int8 are 0
// where the compiler knows no instruction for them on this processor. Each figure is the best of several short runs, all
// threads at once: a ceiling that a busy machine hides is still there.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { LANES = 4, CHAINS = 12, RUNS = 5, MAX_THREADS = 256 };
typedef uint64_t Words __attribute__((vector_size(64)));
typedef uint64_t (*Work)(int thread);

static int num_threads;
static int cores[MAX_THREADS];
static char *memory;
static size_t num_bytes;
static long repeats;
static Work work;
static pthread_barrier_t barrier;
static volatile uint64_t sink[MAX_THREADS];
static double best;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

// A share of the memory, as often as `repeats` says; eight chains keep many cache lines on their way.
static uint64_t read_memory(int thread) {
  const size_t share = num_bytes / num_threads / 512 * 512;
  const char *begin = memory + share * thread;
  Words sums[8] = {0};
  for (long round = 0; round < repeats; round++)
    for (const char *at = begin; at < begin + share; at += 512)
      for (int chain = 0; chain < 8; chain++) sums[chain] ^= *(const Words *)(at + 64 * chain);
  for (int chain = 1; chain < 8; chain++) sums[0] ^= sums[chain];
  return sums[0][0];
}

// Chains by name: compilers keep an array of them in memory, and the peak is then that of loads and stores.
#define CHAINED(what, arguments...)                                                                           \
  what(0, arguments) what(1, arguments) what(2, arguments) what(3, arguments) what(4, arguments)              \
  what(5, arguments) what(6, arguments) what(7, arguments) what(8, arguments) what(9, arguments)              \
  what(10, arguments) what(11, arguments)
#if defined(__x86_64__)
#define IN_REGISTER "+v"
#elif defined(__aarch64__)
#define IN_REGISTER "+w"
#else
#define IN_REGISTER "+m"
#endif
#define BEGIN_CHAIN(chain, Register) Register sum##chain = {0};
#define LENGTHEN_CHAIN(chain, MULTIPLY_ADD)   \
  sum##chain = MULTIPLY_ADD(sum##chain, a, b); \
  __asm__ volatile("" : IN_REGISTER(sum##chain));
#define MULTIPLY(name, Register, Factor, first, second, MULTIPLY_ADD)                           \
  static uint64_t name(int thread) {                                                            \
    Factor a = first, b = second;                                                               \
    CHAINED(BEGIN_CHAIN, Register)                                                              \
    for (long round = 0; round < repeats; round++) { CHAINED(LENGTHEN_CHAIN, MULTIPLY_ADD) }    \
    uint64_t seen;                                                                              \
    memcpy(&seen, &sum0, sizeof seen);                                                          \
    return seen + thread;                                                                       \
  }

#ifdef __x86_64__
#ifdef __AVX512F__
typedef __m512 FloatRegister;
typedef __m512i ByteRegister;
#define FP32_ADD(sum, a, b) _mm512_fmadd_ps(a, b, sum)
#define SET_FLOAT(value) _mm512_set1_ps(value)
#define SET_BYTE(value) _mm512_set1_epi8(value)
#else
typedef __m256 FloatRegister;
typedef __m256i ByteRegister;
#define FP32_ADD(sum, a, b) _mm256_fmadd_ps(a, b, sum)
#define SET_FLOAT(value) _mm256_set1_ps(value)
#define SET_BYTE(value) _mm256_set1_epi8(value)
#endif
#define FP32_OPS (2.0 * sizeof(FloatRegister) / 4)
MULTIPLY(multiply_fp32, FloatRegister, FloatRegister, SET_FLOAT(1e-9f), SET_FLOAT(1.0f), FP32_ADD)

#if defined(__AVX512VNNI__)
#define BYTE_DOT(sum, a, b) _mm512_dpbusd_epi32(sum, a, b)
#elif defined(__AVXVNNI__)
#define BYTE_DOT(sum, a, b) _mm256_dpbusd_avx_epi32(sum, a, b)
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define BYTE_DOT(sum, a, b) \
  _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)))
#endif
#ifdef BYTE_DOT
MULTIPLY(multiply_int8, ByteRegister, ByteRegister, SET_BYTE(1), SET_BYTE(1), BYTE_DOT)
#endif

#ifdef __AVX512BF16__
MULTIPLY(multiply_bf16, __m512, __m512bh, (__m512bh)_mm512_set1_epi16(0x0101), a, _mm512_dpbf16_ps)
#endif
#else
typedef float Floats __attribute__((vector_size(LANES * 4)));
#define FP32_ADD(sum, a, b) (sum + a * b)
#define FP32_OPS (2.0 * LANES)
MULTIPLY(multiply_fp32, Floats, Floats, (Floats){0} + 1e-9f, (Floats){0} + 1.0f, FP32_ADD)
#endif

static void *run(void *argument) {
  const int thread = (int)(intptr_t)argument;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cores[thread], &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  for (int number = 0; number < RUNS; number++) {
    pthread_barrier_wait(&barrier);
    const double begin = seconds();
    sink[thread] = work(thread);
    pthread_barrier_wait(&barrier);
    if (thread == 0 && seconds() - begin < best) best = seconds() - begin;
  }
  return NULL;
}

// Seconds of the best run of all threads.
static double measure(Work what, long times) {
  pthread_t threads[MAX_THREADS];
  work = what, repeats = times, best = 1e9;
  pthread_barrier_init(&barrier, NULL, num_threads);
  for (int thread = 0; thread < num_threads; thread++)
    pthread_create(&threads[thread], NULL, run, (void *)(intptr_t)thread);
  for (int thread = 0; thread < num_threads; thread++) pthread_join(threads[thread], NULL);
  pthread_barrier_destroy(&barrier);
  return best;
}

static double peak(Work what, double ops_per_call) {
  const long times = 4000000;
  return what ? num_threads * times * CHAINS * ops_per_call / measure(what, times) / 1e9 : 0.0;
}

int main(int count, char **words) {
  if (count < 3 || (num_threads = atoi(words[1])) < 1 || num_threads > MAX_THREADS) {
    fprintf(stderr, "usage: ceilings THREADS BYTES...\n");
    return 2;
  }
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  for (int core = 0, found = 0; core < CPU_SETSIZE && found < num_threads; core++)
    if (CPU_ISSET(core, &allowed)) cores[found++] = core;
  printf("{\"read\": {");
  for (int index = 2; index < count; index++) {
    num_bytes = strtoull(words[index], NULL, 10);
    memory = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      fprintf(stderr, "%zu bytes of memory could not be had; give less\n", num_bytes);
      return 1;
    }
    madvise(memory, num_bytes, MADV_HUGEPAGE);
    memset(memory, 1, num_bytes);
    const long times = 1 + (256l << 20) / num_bytes;  // short runs say little
    const double took = measure(read_memory, times);
    printf("%s\"%zu\": %.2f", index > 2 ? ", " : "", num_bytes, times * (double)num_bytes / took / 1e9);
    munmap(memory, num_bytes);
  }
  printf("}, \"fp32\": %.1f", peak(multiply_fp32, FP32_OPS));
#ifdef __AVX512BF16__
  printf(", \"bf16\": %.1f", peak(multiply_bf16, 64.0));
#else
  printf(", \"bf16\": 0");
#endif
#ifdef BYTE_DOT
  printf(", \"int8\": %.1f}\n", peak(multiply_int8, 2.0 * sizeof(ByteRegister)));
#else
  printf(", \"int8\": 0}\n");
#endif
  return 0;
}

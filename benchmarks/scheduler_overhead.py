"""Host time of `schedule()` and `update()` a step, with many decoding requests and no model.

Run: `python benchmarks/scheduler_overhead.py [NUM_REQUESTS]`. Prints the fastest and the median step in milliseconds of
thread time, which a busy machine disturbs least.
"""

from __future__ import annotations

import random
import statistics
import sys
import time

from core.config import SchedulerConfig
from core.kv import KVCacheGroups, KVCacheManager
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from core.sched import ModelRunnerOutput, Scheduler
from core.spec import CacheKind, DType, KVCacheSpec


def layer(window: int = 0) -> KVCacheSpec:
    """A layer of a small model; a window makes it a sliding one."""
    kind = CacheKind.SLIDING if window else CacheKind.FULL
    return KVCacheSpec(kind=kind, num_kv_heads=1, head_dim=64, v_head_dim=64, dtype=DType.BFLOAT16, window=window)


def make_scheduler(layers: list[KVCacheSpec], num_requests: int, prefix_caching: bool) -> Scheduler:
    """A scheduler with that many requests of different lengths, none of which shares a prefix."""
    groups = KVCacheGroups.from_layers(layers)
    kv = KVCacheManager(groups, 60_000, 16, enable_prefix_caching=prefix_caching)
    config = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=8192, max_model_len=4096)
    scheduler, rng = Scheduler(config, kv), random.Random(0)
    for index in range(num_requests):
        prompt = [rng.randrange(32_000) for _ in range(200 + index)]
        params = SamplingParams(max_tokens=2000, eos_token_ids=(50_001, 50_002))
        scheduler.add_request(
            EngineRequest(request_id=f"request-{index}", prompt_token_ids=prompt, sampling_params=params)
        )
    return scheduler


def measure(scheduler: Scheduler, num_steps: int = 500, num_warm_up: int = 50) -> list[float]:
    """Milliseconds of each step after the prompts."""
    times = []
    for _ in range(num_steps):
        start = time.thread_time()
        output = scheduler.schedule()
        spent = time.thread_time() - start
        sampled = {share.request_id: [5] for share in output.scheduled if share.samples}
        result = ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=sampled)
        start = time.thread_time()
        scheduler.update(output, result)
        times.append(1e3 * (spent + time.thread_time() - start))
    return times[num_warm_up:]


def main() -> None:
    """Prints one line for each kind of model."""
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    hybrid = [layer(), layer(), layer()] + [layer(512)] * 15
    for name, layers, cache in [
        ("uniform, prefix cache on", [layer()], True),
        ("uniform, prefix cache off", [layer()], False),
        ("3 full + 15 sliding, cache on", hybrid, True),
    ]:
        times = measure(make_scheduler(layers, num_requests, cache))
        print(
            f"{name:32} {num_requests} requests: fastest {min(times):.3f} ms, median {statistics.median(times):.3f} ms"
        )


if __name__ == "__main__":
    main()

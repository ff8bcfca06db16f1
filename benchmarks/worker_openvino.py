"""OpenVINO GenAI as a worker of `compare.py`, run by the Python of its own environment. Reads a GGUF file directly."""

from __future__ import annotations

import sys

from worker import answer_tests, say


def main() -> None:
    """Loads the model and answers tests."""
    import numpy
    import openvino
    import openvino_genai

    gguf, threads = sys.argv[1], int(sys.argv[2])
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(gguf, scheduler, "CPU", settings)
    say({"engine": "OpenVINO", "version": openvino_genai.__version__})

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos, config.do_sample = True, False
        ids = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        pipeline.generate(ids, [config] * len(ids))

    answer_tests(generate)


if __name__ == "__main__":
    main()

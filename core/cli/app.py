"""The commands of `core`."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated, Any, Literal

import typer

from core.cli.flag_tables import ENGINE_FLAGS, SERVE_FLAGS
from core.cli.flags import with_flags

__all__ = ["app"]

app = typer.Typer(
    name="core",
    help="An LLM inference core in which hardware comes first.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
"""The whole command line; `core.cli.main` runs it and turns errors into lines."""
bench = typer.Typer(name="bench", help="Measure a server, or the engine alone.", no_args_is_help=True)
app.add_typer(bench)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, or a name that `core pull` knows.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 always takes the most likely token.")]
TopP = Annotated[float, typer.Option("--top-p", help="Share of probability to sample from.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Most tokens to generate.")]


@app.command()
@with_flags(server=SERVE_FLAGS, engine=ENGINE_FLAGS)
def serve(model: Model, server: dict[str, Any], engine: dict[str, Any]) -> None:
    """Serve a model over the OpenAI API."""
    from core.cli.flags import engine_config, serve_settings
    from core.cli.serve import run_server

    run_server(engine_config(model, engine), serve_settings(server))


@app.command()
@with_flags(engine=ENGINE_FLAGS)
def run(
    model: Model,
    engine: dict[str, Any],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Ask this and leave.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = None,
) -> None:
    """Chat with a model in the terminal. /clear forgets the conversation, /bye leaves, Ctrl-C stops an answer."""
    from core.cli.chat import Conversation, chat
    from core.cli.flags import engine_config
    from core.sampling_params import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
    chat(engine_config(model, engine), Conversation(system), params, prompt)


@app.command()
@with_flags(engine=ENGINE_FLAGS)
def generate(
    model: Model,
    engine: dict[str, Any],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")] = None,
    prompt_file: Annotated[str | None, typer.Option("--prompt-file", help="One prompt a line; - is stdin.")] = None,
    n: Annotated[int, typer.Option("--n", help="Choices a prompt.")] = 1,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Candidates to sample from; 0 keeps all.")] = 0,
    max_tokens: MaxTokens = 128,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Text that ends an answer; may be repeated.")] = None,
    logprobs: Annotated[int | None, typer.Option("--logprobs", help="Candidates to report; needs --json.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of text.")] = False,
    json: AsJson = False,
) -> None:
    """Continue prompts without a server."""
    from core.cli.flags import engine_config
    from core.cli.generate import generate_all, read_prompts
    from core.sampling_params import SamplingParams

    params = SamplingParams(
        n=n,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        logprobs=logprobs,
        ignore_eos=ignore_eos,
    )
    generate_all(engine_config(model, engine), read_prompts(prompt or [], prompt_file), params, as_json=json)


@app.command()
@with_flags(engine=ENGINE_FLAGS)
def batch(
    file: Annotated[str, typer.Argument(metavar="FILE", help="OpenAI batch input, one request a line.")],
    engine: dict[str, Any],
    model: Annotated[str, typer.Option("--model", help="A folder, a GGUF file, or a name that `core pull` knows.")],
    output: Annotated[
        str | None, typer.Option("--output-file", "-o", help="Where results go [default: FILE with .out.jsonl].")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", help="Name that the requests use; may be repeated.")
    ] = None,
) -> None:
    """Run a file of requests. Called again, it goes on where it was stopped."""
    from core.cli.batch import run_batch
    from core.cli.flags import engine_config

    run_batch(engine_config(model, engine), file, output, tuple(served_model_name or ()))


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Model to fetch.")],
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit [default: newest].")] = None,
) -> None:
    """Fetch a model, so that it can be served by its name."""
    from core.cli.pull import pull_model

    pull_model(name, revision)


@bench.command("serve")
def bench_serve(
    base_url: Annotated[str, typer.Option("--base-url", help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", help="Name in requests [default: asked of it].")] = None,
    endpoint: Annotated[
        Literal["/v1/completions", "/v1/chat/completions"], typer.Option("--endpoint", help="Route to measure.")
    ] = "/v1/completions",
    dataset_name: Annotated[
        Literal["random", "prefix_repetition", "custom"],
        typer.Option("--dataset-name", help="Random prompts, prompts with shared prefixes, or a file."),
    ] = "random",
    dataset_path: Annotated[
        str | None, typer.Option("--dataset-path", help="JSON lines with 'prompt' and 'output_tokens', for custom.")
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="Requests to send.")] = 100,
    request_rate: Annotated[
        float, typer.Option("--request-rate", help="Requests a second, Poisson arrivals; inf sends all at once.")
    ] = float("inf"),
    burstiness: Annotated[float, typer.Option("--burstiness", help="1 is Poisson; less is burstier.")] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", help="Requests in flight [default: no bound].")
    ] = None,
    random_input_len: Annotated[int, typer.Option("--random-input-len", help="Prompt tokens of random.")] = 1024,
    random_output_len: Annotated[int, typer.Option("--random-output-len", help="Output tokens of random.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option("--random-range-ratio", help="Lengths vary by this share around the given ones.")
    ] = 0.0,
    prefix_repetition_prefix_len: Annotated[int, typer.Option(help="Tokens of a shared prefix.")] = 256,
    prefix_repetition_suffix_len: Annotated[int, typer.Option(help="Tokens of its own of each prompt.")] = 256,
    prefix_repetition_num_prefixes: Annotated[int, typer.Option(help="Different prefixes.")] = 10,
    prefix_repetition_output_len: Annotated[int, typer.Option(help="Output tokens.")] = 128,
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Random ids are below it.")] = 10000,
    temperature: Annotated[float, typer.Option("--temperature", help="Sampling temperature.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Generate the full output length.")
    ] = True,
    num_warmups: Annotated[int, typer.Option("--num-warmups", help="Requests before the measurement.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Seed of prompts and arrivals.")] = 0,
    percentile_metrics: Annotated[
        str, typer.Option("--percentile-metrics", help="Of ttft, tpot, itl, e2el, comma-separated.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, typer.Option("--metric-percentiles", help="Percentiles, comma-separated.")
    ] = "50,90,99",
    goodput: Annotated[
        list[str] | None, typer.Option("--goodput", help="Bound in ms, as ttft:200; may be repeated.")
    ] = None,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the result as a JSON file.")] = False,
    result_filename: Annotated[
        str | None, typer.Option("--result-filename", help="Its name [default: made of model and time].")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="CORE_API_KEY", help="Key of the server.")] = None,
) -> None:
    """Measure a running server: throughput, and latency percentiles of streamed answers."""
    options = dict(locals())
    from core.cli.bench_serve import ServeBench, run_serve_bench

    run_serve_bench(ServeBench(**options))


@bench.command("offline")
@with_flags(engine=ENGINE_FLAGS)
def bench_offline(
    model: Model,
    engine: dict[str, Any],
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="Requests.")] = 32,
    input_len: Annotated[int, typer.Option("--input-len", help="Prompt tokens.")] = 512,
    output_len: Annotated[int, typer.Option("--output-len", help="Output tokens.")] = 128,
    output_json: Annotated[str | None, typer.Option("--output-json", help="Write the result to this file.")] = None,
) -> None:
    """Measure the engine without HTTP: all requests at once."""
    from core.cli.bench_offline import run_offline_bench
    from core.cli.flags import engine_args

    run_offline_bench(model, engine_args(engine), num_prompts, input_len, output_len, output_json)


@bench.command("perplexity")
@with_flags(engine=ENGINE_FLAGS)
def bench_perplexity(
    model: Model,
    engine: dict[str, Any],
    text: Annotated[str | None, typer.Option("--text", help="A file [default: a text that comes along].")] = None,
    window: Annotated[int, typer.Option("--window", help="Tokens that are seen together.")] = 1024,
    num_tokens: Annotated[
        int | None, typer.Option("--num-tokens", help="Only the first of the text [default: all].")
    ] = None,
    output_json: Annotated[str | None, typer.Option("--output-json", help="Write the result to this file.")] = None,
) -> None:
    """Measure how well the model, in the types it is served in here, predicts a text."""
    from core.cli.bench_perplexity import run_perplexity_bench
    from core.cli.flags import engine_args

    run_perplexity_bench(model, engine_args(engine), text, window, num_tokens, output_json)


@app.command()
def backends(json: AsJson = False) -> None:
    """List installed backends, their devices, and what keeps broken ones from working."""
    from core.cli.devices import show_backends

    show_backends(as_json=json)


@app.command()
@with_flags(engine=ENGINE_FLAGS)
def doctor(
    engine: dict[str, Any],
    model: Annotated[
        str,
        typer.Option("--model", help="A folder, a GGUF file, or a name that `core pull` knows.", show_default=False),
    ] = "",
    ops: Annotated[
        str, typer.Option("--ops", metavar="FILE", help="A list of operations in place of a model.", show_default=False)
    ] = "",
    arch: Annotated[
        str, typer.Option("--arch", help="An architecture of --device, which need not be here.", show_default=False)
    ] = "",
    json: AsJson = False,
) -> None:
    """Say, operation by operation, how a model would run on a device. Reads no weights, takes no device."""
    from core.cli.devices import show_doctor
    from core.cli.flags import engine_config

    show_doctor(engine_config(model, engine), arch=arch, ops=ops, as_json=json)


@app.command("new-backend")
def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The word after --device, as my-chip.")],
    folder: Annotated[str, typer.Option("--dir", help="Where the package's folder is made.", metavar="DIR")] = ".",
    torch_device: Annotated[
        str, typer.Option("--torch-device", help="What torch calls the device, the word that torch.device() takes.")
    ] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Write a package for a new chip: four methods over torch, the conformance suite as its test, CI."""
    from pathlib import Path

    from core.cli.new_backend import create_backend

    create_backend(name, Path(folder).expanduser(), torch_device, force=force)


@app.command()
def version() -> None:
    """Print the version."""
    from core.serve.version import product_version

    typer.echo(product_version())


if importlib.util.find_spec("core_conformance"):

    @app.command(
        "conformance",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )
    def conformance(context: typer.Context) -> None:
        """Show that a backend does what the contract says (run, list); brought by core-conformance."""
        importlib.import_module("core_conformance.cli").main(context.args)

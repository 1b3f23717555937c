"""Greedy decoding with a cache: ours beside transformers' `generate` on the same weights.

    python benchmarks/decoding.py                   # writes benchmarks/results/decoding.json
    python benchmarks/decoding.py --quick

One row, a prompt of 32 tokens and 64 new ones. `llama@eager` has its usual growing cache, `llama@static` a static one
with a compiled forward pass. Llama carries the weights of our `pre`; that both give the same tokens is in the file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from contestants import OURS, SHAPES, Shape, build
from race import Results, Turn, arguments
from siamesenorm.models.lm import generate

PROMPT, TOKENS = 32, 64


def as_llama(ours: nn.Module, shape: Shape) -> Any:
    """transformers' Llama with the weights of our Pre-Norm model."""
    state = ours.state_dict()
    renamed = {
        "model.embed_tokens.weight": state["embedding.weight"],
        "model.norm.weight": state["residual.final_norm.weight"],
        "lm_head.weight": state["head.weight"],
    }
    for l in range(shape.blocks):
        q, k, v = state[f"blocks.{l}.attention.qkv.weight"].chunk(3)
        value, gate = state[f"blocks.{l}.ffn.up.weight"].chunk(2)
        theirs = f"model.layers.{l}"
        renamed |= {
            f"{theirs}.input_layernorm.weight": state[f"blocks.{l}.links.0.norm.weight"],
            f"{theirs}.post_attention_layernorm.weight": state[f"blocks.{l}.links.1.norm.weight"],
            f"{theirs}.self_attn.q_proj.weight": q,
            f"{theirs}.self_attn.k_proj.weight": k,
            f"{theirs}.self_attn.v_proj.weight": v,
            f"{theirs}.self_attn.o_proj.weight": state[f"blocks.{l}.attention.out.weight"],
            f"{theirs}.mlp.up_proj.weight": value,
            f"{theirs}.mlp.gate_proj.weight": gate,
            f"{theirs}.mlp.down_proj.weight": state[f"blocks.{l}.ffn.down.weight"],
        }
    llama = build("llama", shape)
    llama.load_state_dict(renamed)
    return llama.eval()


def their_generate(llama: Any, prompt: Tensor, tokens: int, static: bool) -> Callable[[], list[int]]:
    """transformers' `generate`, with a growing cache or with a static one and a compiled forward pass."""
    options: dict[str, Any] = {}
    if static:
        from transformers.generation import CompileConfig

        config = CompileConfig(mode="default", dynamic=False)
        config._compile_all_devices = True  # it would compile on accelerators alone
        options = {"cache_implementation": "static", "compile_config": config}
    mask = torch.ones_like(prompt)

    @torch.no_grad()
    def turn() -> list[int]:
        rows = llama.generate(
            prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False, use_cache=True, **options
        )
        return rows[0, prompt.shape[1] :].tolist()

    return turn


def line_up(shape: Shape, tokens: int, ways: list[str]) -> dict[str, Turn]:
    """Turns that return the new tokens."""
    prompt = torch.randint(1, shape.vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    ours: dict[str, Any] = {name: build(name, shape).eval() for name in OURS}
    turns: dict[str, Turn] = {
        f"{name}@eager": lambda model=model: generate(model, prompt, max_new_tokens=tokens)[0]  # type: ignore[misc]
        for name, model in ours.items()
    }
    for way in ("eager", "static"):
        if way in ways:
            turns[f"llama@{way}"] = their_generate(as_llama(ours["pre"], shape), prompt, tokens, way == "static")
    return turns


def main() -> int:
    parser = arguments(__doc__, "decoding", rounds=20)
    parser.add_argument("--shapes", nargs="+", default=["d512x12"], choices=list(SHAPES))
    parser.add_argument("--ways", nargs="+", default=["eager", "static"], choices=["eager", "static"])
    args = parser.parse_args()
    results = Results(parser, args, ways=args.ways)
    tokens = 8 if args.quick else TOKENS
    for name in args.shapes[:1] if args.quick else args.shapes:
        shape = SHAPES[name].quick() if args.quick else SHAPES[name]

        def line() -> dict[str, Turn]:
            turns = line_up(shape, tokens, args.ways)  # noqa: B023
            theirs = [turn() for contestant, turn in turns.items() if contestant.startswith("llama")]
            same = all(answer == turns["pre@eager"]() for answer in theirs)
            results.data["facts"][f"{name} same tokens"] = same  # noqa: B023
            return turns

        results.race(name, line, shape=vars(shape), prompt=PROMPT, tokens=tokens)
    return results.close()


if __name__ == "__main__":
    sys.exit(main())

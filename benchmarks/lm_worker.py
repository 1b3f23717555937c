"""One contestant of benchmarks/lm.py: builds a model, then runs a step whenever its parent sends a line.

Runs in whatever environment its peer needs; only `siamesenorm` contestants import the package. Each line read is a
command (``train``, ``decode N``, ``peak``, ``parameters``), each line written a JSON answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 8192
CONTEXT = 1024


class Shape(argparse.Namespace):
    """Width, blocks, heads, FFN width, sequence, batch, threads."""

    dim: int
    blocks: int
    heads: int
    hidden: int
    sequence: int
    batch: int


def build(contestant: str, shape: Shape) -> Any:
    """A contestant by its name."""
    family, _, detail = contestant.partition(":")
    if family == "siamesenorm":
        return Ours(shape, detail or "siamese")
    if family == "transformers":
        return Transformers(shape, detail or "llama")
    if family == "x-transformers":
        return XTransformers(shape)
    if family == "litgpt":
        return LitGPT(shape)
    raise SystemExit(f"contestant: {contestant!r} is unknown")


class Contestant:
    """A model and the two things that are timed."""

    model: nn.Module

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Mean next-token loss."""
        logits = self.logits(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def logits(self, inputs: Tensor) -> Tensor:
        """(batch, tokens, vocabulary)."""
        raise NotImplementedError

    def decode(self, prompt: Tensor, count: int) -> Tensor:
        """Greedy continuation with a cache."""
        raise NotImplementedError


class Ours(Contestant):
    """Our own; the detail is a topology, with ``+compiled`` behind it for torch.compile."""

    def __init__(self, shape: Shape, detail: str) -> None:
        from siamesenorm.models.lm import LanguageModel, LMConfig

        topology, _, compiled = detail.partition("+")
        self.model = LanguageModel(
            LMConfig(
                vocab_size=VOCABULARY,
                dim=shape.dim,
                blocks=shape.blocks,
                heads=shape.heads,
                ffn_dim=shape.hidden,
                topology=topology,
                max_length=CONTEXT,
            ),
            seed=0,
        )
        self.run: Any = torch.compile(self.model) if compiled else self.model

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Through the chunked cross-entropy, as in training."""
        return self.run(inputs, labels=labels).loss

    def decode(self, prompt: Tensor, count: int) -> Tensor:
        """The package's own generation."""
        from siamesenorm.models.lm import generate

        return torch.tensor(generate(self.model, prompt, max_new_tokens=count))  # type: ignore[arg-type]


class Transformers(Contestant):
    """Llama or OLMo-2 of the transformers library; llama can carry the weights of our Pre-Norm model."""

    def __init__(self, shape: Shape, detail: str) -> None:
        import transformers

        kinds = {
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
        }
        config, model = kinds[detail]
        self.model = model(
            config(
                vocab_size=VOCABULARY,
                hidden_size=shape.dim,
                intermediate_size=shape.hidden,
                num_hidden_layers=shape.blocks,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.heads,
                max_position_embeddings=CONTEXT,
                rms_norm_eps=1e-5,
                tie_word_embeddings=False,
                pad_token_id=0,
                bos_token_id=None,
                eos_token_id=None,
            )
        )

    def logits(self, inputs: Tensor) -> Tensor:
        """The model's own forward."""
        return self.model(inputs, use_cache=False).logits

    def decode(self, prompt: Tensor, count: int) -> Tensor:
        """transformers' generate."""
        mask = torch.ones_like(prompt)
        return self.model.generate(  # type: ignore[operator]
            prompt, attention_mask=mask, max_new_tokens=count, do_sample=False, use_cache=True
        )


class XTransformers(Contestant):
    """x-transformers with rotary positions, RMSNorm, SwiGLU and flash attention."""

    def __init__(self, shape: Shape) -> None:
        from x_transformers import Decoder, TransformerWrapper

        self.model = TransformerWrapper(
            num_tokens=VOCABULARY,
            max_seq_len=CONTEXT,
            use_abs_pos_emb=False,
            attn_layers=Decoder(
                dim=shape.dim,
                depth=shape.blocks,
                heads=shape.heads,
                attn_dim_head=shape.dim // shape.heads,
                rotary_pos_emb=True,
                rotary_emb_dim=shape.dim // shape.heads,
                use_rmsnorm=True,
                attn_flash=True,
                ff_glu=True,
                ff_swish=True,
                ff_no_bias=True,
                ff_mult=shape.hidden / shape.dim,
            ),
        )

    def logits(self, inputs: Tensor) -> Tensor:
        """The model's own forward."""
        return self.model(inputs)


class LitGPT(Contestant):
    """litgpt's GPT in its Llama form."""

    def __init__(self, shape: Shape) -> None:
        from litgpt import GPT, Config

        self.model = GPT(
            Config(
                name="race",
                block_size=shape.sequence,
                vocab_size=VOCABULARY,
                padded_vocab_size=VOCABULARY,
                n_layer=shape.blocks,
                n_head=shape.heads,
                n_query_groups=shape.heads,
                n_embd=shape.dim,
                head_size=shape.dim // shape.heads,
                rotary_percentage=1.0,
                parallel_residual=False,
                bias=False,
                norm_class_name="RMSNorm",
                norm_eps=1e-5,
                mlp_class_name="LLaMAMLP",
                intermediate_size=shape.hidden,
            )
        )

    def logits(self, inputs: Tensor) -> Tensor:
        """The model's own forward."""
        return self.model(inputs)


def copy_weights(contestant: Contestant, file: Path, save: bool) -> None:
    """Give transformers' Llama the function of our Pre-Norm model, so that decoding races on the same weights."""
    if save and isinstance(contestant, Ours):
        torch.save(contestant.model.state_dict(), file)
    elif not save and isinstance(contestant, Transformers):
        state = torch.load(file, weights_only=True)
        target = contestant.model.state_dict()
        blocks = sum(name.endswith("input_layernorm.weight") for name in target)
        renamed = {
            "model.embed_tokens.weight": state["embedding.weight"],
            "model.norm.weight": state["residual.final_norm.weight"],
            "lm_head.weight": state["head.weight"],
        }
        for l in range(blocks):
            q, k, v = state[f"blocks.{l}.attention.qkv.weight"].chunk(3)
            value, gate = state[f"blocks.{l}.ffn.up.weight"].chunk(2)
            prefix = f"model.layers.{l}"
            renamed |= {
                f"{prefix}.input_layernorm.weight": state[f"blocks.{l}.links.0.norm.weight"],
                f"{prefix}.post_attention_layernorm.weight": state[f"blocks.{l}.links.1.norm.weight"],
                f"{prefix}.self_attn.q_proj.weight": q,
                f"{prefix}.self_attn.k_proj.weight": k,
                f"{prefix}.self_attn.v_proj.weight": v,
                f"{prefix}.self_attn.o_proj.weight": state[f"blocks.{l}.attention.out.weight"],
                f"{prefix}.mlp.up_proj.weight": value,
                f"{prefix}.mlp.gate_proj.weight": gate,
                f"{prefix}.mlp.down_proj.weight": state[f"blocks.{l}.ffn.down.weight"],
            }
        contestant.model.load_state_dict(renamed)


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("contestant")
    for name in ("dim", "blocks", "heads", "hidden", "sequence", "batch", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--save-weights", type=Path)
    parser.add_argument("--load-weights", type=Path)
    shape = parser.parse_args(namespace=Shape())
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries may print; the pipe carries answers alone
    torch.set_num_threads(shape.threads)
    torch.manual_seed(0)
    contestant = build(shape.contestant, shape)
    if shape.save_weights or shape.load_weights:
        copy_weights(contestant, shape.save_weights or shape.load_weights, save=bool(shape.save_weights))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (shape.batch, shape.sequence + 1), generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    optimizer = torch.optim.AdamW(contestant.model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = contestant.loss(inputs, labels)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        start = time.perf_counter()
        answer: dict[str, Any] = {}
        if command == "train":
            contestant.model.train()
            answer["loss"] = step()
        elif command == "decode":
            contestant.model.eval()
            with torch.no_grad():
                out = contestant.decode(inputs[:1, :32], int(argument))
            answer["tokens"] = out[0].tolist()[-int(argument) :]
        elif command == "peak":
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts anew
            step()
            answer["kib"] = resident("VmHWM") - before
        elif command == "parameters":
            answer["count"] = sum(p.numel() for p in contestant.model.parameters())
        answer["seconds"] = time.perf_counter() - start
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

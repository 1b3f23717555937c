"""Where the time of greedy decoding goes: one token at a time on one thread, by function.

python benchmarks/decode_profile.py
"""

from __future__ import annotations

import cProfile
import io
import pstats
from pathlib import Path

import torch

from siamesenorm.models.lm import LanguageModel, LMConfig, generate

RESULT = Path(__file__).parent / "results" / "decode_profile.txt"
TOKENS = 64


def main() -> None:
    """Profile the shape d256x8 of benchmarks/lm.py."""
    torch.set_num_threads(1)
    shape = LMConfig(vocab_size=8192, dim=256, blocks=8, heads=4, ffn_dim=704, max_length=1024, topology="pre")
    model = LanguageModel(shape, seed=0)
    prompt = torch.randint(0, 8192, (1, 32), generator=torch.Generator().manual_seed(0))
    generate(model, prompt, max_new_tokens=TOKENS)
    with cProfile.Profile() as profile:
        generate(model, prompt, max_new_tokens=TOKENS)
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text)
    stats.strip_dirs().sort_stats("tottime").print_stats(25)
    RESULT.write_text(
        f"python benchmarks/decode_profile.py: {TOKENS} tokens, width 256, 8 blocks, one thread\n{text.getvalue()}"
    )
    print(text.getvalue())


if __name__ == "__main__":
    main()

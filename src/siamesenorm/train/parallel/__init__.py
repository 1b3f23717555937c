"""A model spread over processes, from outside: data, tensor, sequence, expert and pipeline parallelism.

from siamesenorm.train.parallel import apply_parallelism, clip_gradients, uniform_groups
model = apply_parallelism(model, World.start())
"""

from siamesenorm.train.parallel.gradients import clip_gradients, uniform_groups
from siamesenorm.train.parallel.parallelize import apply_parallelism

__all__ = ["apply_parallelism", "clip_gradients", "uniform_groups"]

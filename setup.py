"""The one thing that pyproject.toml cannot yet say: the optional CPU kernels in plain C."""

from setuptools import Extension, setup

# optional: without a C compiler the install goes on, and PyTorch's operators do the work.
# The last four flags let sums run over vector lanes; NaN and infinity keep their meaning.
FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]

SOURCES = ("residual/kernels/rows", "residual/kernels/sinkhorn", "layers/kernels/sublayers", "layers/kernels/experts")

setup(
    ext_modules=[
        Extension(
            "siamesenorm.residual.kernels._kernels",
            [f"src/siamesenorm/{name}.c" for name in SOURCES],
            depends=[f"src/siamesenorm/residual/kernels/{name}.h" for name in ("rows", "exponential")],
            libraries=["m"],
            optional=True,
            extra_compile_args=FLAGS,
        )
    ]
)

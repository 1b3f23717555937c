"""The one thing that pyproject.toml cannot yet say: the optional CPU kernels in plain C."""

from setuptools import Extension, setup

# optional: without a C compiler the install goes on, and PyTorch's operators do the work.
# The last four flags let sums run over vector lanes; NaN and infinity keep their meaning.
FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]

setup(
    ext_modules=[
        Extension(
            "siamesenorm.residual._kernels",
            [f"src/siamesenorm/{name}.c" for name in ("residual/kernels", "layers/kernels", "layers/experts")],
            depends=["src/siamesenorm/residual/rows.h", "src/siamesenorm/layers/exponential.h"],
            libraries=["m"],
            optional=True,
            extra_compile_args=FLAGS,
        )
    ]
)

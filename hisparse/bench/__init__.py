"""Benchmarks: one module a claim, each with `run(...)` that gives the facts of the run and rows beside their yardsticks.

`hisparse bench` is how they are started; from a checkout `python -m benchmarks.bench_<name>` does the same.
"""

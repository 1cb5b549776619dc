"""Builds a fault into SGLang at start-up, where the CPU stand-in's own hook is not on PYTHONPATH (GPUs)."""

import os

import kvcheck_mutants

if os.environ.get("KVCHECK_MUTANT"):
    kvcheck_mutants.install(os.environ["KVCHECK_MUTANT"])

"""Measuring on this machine: ``mlx-linattn bench`` (speed and memory by context) and ``mlx-linattn recall`` (what is remembered)."""

"""mlx_linattn: linear-attention hybrid language models on Apple Silicon and anywhere else MLX runs."""

"""``mlx-linattn serve``: one engine behind OpenAI's HTTP interface. Needs the extra ``server``."""

"""How much of a prompt is read at a time, so that a chat stays alive while it reads."""

import pytest

from mlx_linattn.chat.repl import step_of_a_second


@pytest.mark.parametrize(
    ("tokens", "seconds", "step"),
    [
        (0, 0.0, 256),
        (24, 0.3, 256),
        (1000, 10.0, 64),
        (1000, 2.0, 256),
        (3000, 2.0, 1024),
        (5000, 2.0, None),
        (256, 100.0, 64),
    ],
)
def test_a_piece_takes_about_a_second_at_the_measured_speed(tokens, seconds, step):
    assert step_of_a_second(tokens, seconds) == step

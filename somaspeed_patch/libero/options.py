"""Values of the LIBERO adapter's features; imports nothing."""

from __future__ import annotations


def steps_between_images(text: bool | str | None) -> int | None:
    """The value of `render_every`.

    Args: text: a whole number of environment steps, None for every step.
    Raises: ValueError: it is no such number, or below 1.
    """
    if text is None:
        return None
    if not isinstance(text, str) or not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(
            f"libero: render_every must be a whole number of steps, 1 or more, but is {text!r}; "
            "give the policy's n_action_steps, or a divisor of it"
        )
    return int(text)

"""Fresh processes for tests of import and patch orders, without importing the heavy libraries in each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any


def in_forks(orders: Iterable[str], child: Callable[[str], Any]) -> dict[str, Any]:
    """What `child` returns for each order, each in a fork of this process, one after the other.

    Returns: by order; {"error": the exception} where it raised.
    """
    return {order: _in_fork(order, child) for order in orders}


def _in_fork(order: str, child: Callable[[str], Any]) -> Any:
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            answer = child(order)
        except BaseException as error:
            answer = {"error": repr(error)}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = json.loads(pipe.read())
    os.wait()
    return answer

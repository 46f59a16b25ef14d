"""Whether the Hugging Face hub can be reached at all, asked before its client tries again and again."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request

TIMEOUT_S = 3.0


def reachable(url: str) -> bool:
    """Whether a server answers within seconds; a proxy set in the environment is used."""
    answered = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S).close()
            answered.append(True)
        except urllib.error.HTTPError:
            answered.append(True)  # it refused, so it is there
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=ask, daemon=True)  # a name that does not resolve can take longer than its timeout
    thread.start()
    thread.join(TIMEOUT_S + 1)
    return bool(answered)

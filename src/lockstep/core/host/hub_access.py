"""Whether the Hugging Face hub can be reached: one quick request, where its own clients retry for 20 s and more."""

import requests

CONNECT_SECONDS = 2.0


def hub_answers() -> bool:
    """Return whether the hub's address (HF_ENDPOINT) accepts a connection and offline mode (HF_HUB_OFFLINE) is off."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        requests.head(constants.ENDPOINT, timeout=CONNECT_SECONDS)
    except requests.RequestException:
        return False
    return True

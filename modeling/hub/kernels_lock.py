"""The published kernels that flashcell runs. Written by scripts/publish_kernels."""

LOCK = {
    "format": 1,
    "kernels": {
        "diagonal-rnn": {
            "repo": "flashcell/diagonal-rnn",
            "version": 1,
            "revision": None,
            "variants": {},
        },
        "fused-rnn": {
            "repo": "flashcell/fused-rnn",
            "version": 1,
            "revision": None,
            "variants": {},
        },
        "tfla": {
            "repo": "flashcell/tfla",
            "version": 1,
            "revision": None,
            "variants": {},
        },
    },
}

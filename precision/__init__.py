"""Trivet's own precision: plugins like anybody's, found through entry points and never imported by the core."""

if __name__ != "trivet.precision":
    raise ImportError(
        f"this folder is the package 'trivet.precision', but it was imported as {__name__!r}. Install trivet first."
    )

"""Trivet's own accelerators: plugins like anybody's, found through entry points and never imported by the core."""

if __name__ != "trivet.accelerators":
    raise ImportError(
        f"this folder is the package 'trivet.accelerators', but it was imported as {__name__!r}. Install trivet first."
    )

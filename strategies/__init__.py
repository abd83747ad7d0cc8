"""Trivet's own strategies: plugins like anybody's, found through entry points and never imported by the core."""

if __name__ != "trivet.strategies":
    raise ImportError(
        f"this folder is the package 'trivet.strategies', but it was imported as {__name__!r}. Install trivet first."
    )

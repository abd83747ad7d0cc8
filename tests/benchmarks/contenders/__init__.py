"""One file per contender: ``SUPPORTS``, what it can do of `Asked`, and ``fit(task, asked)``, which trains."""

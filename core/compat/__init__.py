"""Other libraries' words, in terms of Trivet's."""

"""What the tiny models share: files made once, redirected names, words as tokens, repeated episodes."""

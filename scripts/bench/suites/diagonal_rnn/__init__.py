"""Cases and providers of diagonal-rnn."""

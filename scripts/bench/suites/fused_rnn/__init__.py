"""Cases and providers of fused-rnn."""

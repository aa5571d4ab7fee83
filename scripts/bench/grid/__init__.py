"""Times random calls of flashcell's LSTM, GRU and RNN beside torch.nn's own."""

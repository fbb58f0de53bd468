"""Recurrent layers: what nn.RNN, nn.LSTM and nn.GRU share, and the time loops of each."""

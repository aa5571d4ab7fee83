"""Other people's models on flashcell's kernels: `accelerate`, and the function `flashrnn`.

slstm_cells.py   sLSTM and LSTM cells of the packages xlstm, tirex-ts and tirex-2
mlstm_cells.py   mLSTM cells of xlstm, mlstm_kernels and transformers
trajectories.py  recurrent modules of torchrl and sb3-contrib, whose rows hold several episodes
accelerate.py    finds them in a model, swaps them and swaps them back
flashrnn.py      the function and configuration of the package flashrnn
"""

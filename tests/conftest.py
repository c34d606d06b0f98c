import torch

# Tests are many and small: threads would only wait for one another.
torch.set_num_threads(1)

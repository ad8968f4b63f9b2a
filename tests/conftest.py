import torch

torch.set_num_threads(1)  # tests run beside other things; two OpenMP threads that wait for each other are slower than one

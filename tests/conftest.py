"""One thread per test process: two processes with two threads each on two cores crawl."""

import torch

torch.set_num_threads(1)

"""One thread per test process: two processes with two threads each on two cores crawl.

Examples that hypothesis draws are the same in every run; pytest --hypothesis-profile=explore looks for new ones.
"""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")

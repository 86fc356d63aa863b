"""Engines and their reference compute on one thread: the machine's other cores belong to other tests."""

import torch

torch.set_num_threads(1)

"""What a step carries, what each stage makes of it, and what must come back."""

import torch

MIDDLE, LAST = 1, 2
STAGES = 3


def tensor(number, size):
    """The tensor of step `number`, of `size` bytes: no two steps have one in common."""
    return torch.arange(size // 8, dtype=torch.int64) + number * 7919


def compute(stage, x):
    """What a later stage makes of its tensor."""
    return x * 3 + 1 if stage == MIDDLE else x * 5 - 2


def expected(number, size):
    """What stage 0 must get back for step `number`."""
    return compute(LAST, compute(MIDDLE, tensor(number, size)))


def visit(stage, replica, pid, reads):
    """The line that a stage adds to the path of a step. `reads` is the number of reads that its engine has done: it
    counts one more for each step, unless the tensor came another way."""
    return {"stage": stage, "replica": replica, "pid": pid, "reads": reads}

"""Every large tensor of the drafter's training step, as expressions of its parameters; loads without torch.

    terms          numbers that remember the expression they came from
    parameters     what of a probe's parameters decides a shape
    rows           the numbers of one row: context tokens, slots, rows that meet the vocabulary
    weights        parameters, their gradients, what an optimizer keeps
    states         inputs, the slots' and the context's states, projections, feed-forward
    attention      scores, masks, expanded keys and values of each backend
    vocabulary     logits and what is made of them

The list is checked against real allocations (tests/payload/test_shapes.py): what applies is born with that
shape and type, where it says, and nothing large is born that it does not name.
"""

"""Mistakes of scripts with lockstep.Loop: each gets a message that says what to write instead."""

import pathlib
from functools import partial

import torch
import torch.nn.functional as F
from own_loops import SIZES, Net, Points, halved, losses, made, one_cycle, trained
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler

import lockstep
from lockstep.base.errors import LockstepError


def test_mistakes_are_told(ranks, tmp_path):
    for mistake, fragment in MISTAKES.items():
        (said,) = ranks(1, said_of, tmp_path / mistake.__name__, mistake)
        assert fragment in said, (mistake.__name__, said)


def said_of(folder, mistake):
    """What a mistake is answered with, and that the weights are as before."""
    try:
        mistake(folder)
    except LockstepError as error:
        return str(error)
    return "nothing"


def forgets_backward(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            losses(model, batch)


def keeps_a_file(folder):
    model, _, loop = made(folder, save_steps=1)
    loop.variables["log"] = pathlib.Path(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))


def takes_a_mean(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch, "mean") + 0.1 * model.heads[0].weight.sum())


def gives_no_sum(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch, "none"))


def detaches(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch).detach())


def has_an_infinite_loss(folder):
    """It is noticed at the end, eight steps later."""
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch) * (float("inf") if step.number == 1 else 1.0))


def counts_backwards(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch), count=-len(batch["y"]))


def counts_in_words(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch), count="8")


def schedules_by_a_name(folder):
    made(folder, schedule="cosine")


def gives_the_class_of_a_scheduler(folder):
    made(folder, scheduler=lambda _: lr_scheduler.ExponentialLR)


def makes_no_scheduler(folder):
    made(folder, scheduler=lambda _: lambda optimizer, steps: None)


def runs_its_own_backward(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            losses(model, batch).backward()


def goes_backward_twice(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
            step.backward(losses(model, batch))


def updates_by_itself(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
            loop._state.optimizer.step()


def clips_by_norm(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
            clip_grad_norm_(model.parameters(), 1.0)


def clips_values_after_the_step(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
        nn.utils.clip_grad_value_(model.parameters(), 1.0)


def leaves_a_step(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
            break


def runs_steps_twice(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
        for _ in step:
            pass


def calls_the_model_between_steps(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
        model(batch["x"])


def forgets_to_train(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
        model.eval()


def freezes_too_late(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
            model.heads[0].weight.requires_grad_(False)


def schedules_micro_batches(folder):
    model, scheduler, loop = made(folder, scheduler=one_cycle)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
            scheduler.step()


def keeps_a_scheduler_to_itself(folder):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one_cycle(optimizer)
    lockstep.Loop(model, optimizer, Points(), folder=folder, **SIZES)


def gives_a_loader(folder):
    made(folder, dataset=torch.utils.data.DataLoader(Points()))


def gives_a_stream(folder):
    made(folder, dataset=iter(Points()))


def leaves_out_a_weight(folder):
    model = Net()
    lockstep.Loop(model, torch.optim.SGD(model.body.parameters(), lr=0.1), Points(), folder=folder, **SIZES)


def makes_a_layer_late(folder):
    model, _, loop = made(folder)
    for step in loop:
        for batch in step:
            if not hasattr(model, "late"):
                model.late = nn.Linear(2, 2)
            step.backward(F.cross_entropy(model.late(model(batch["x"])), batch["y"], reduction="sum"))


def takes_large_micro_batches(folder):
    made(folder, micro_batch=32)


def takes_another_number(folder):
    made(folder, precision="fp8")


def evaluates_less_than_a_sample(folder):
    _, _, loop = made(folder)
    loop.evaluate(Points(), lambda batch: {"samples": len(batch["x"])}, micro_batch=-3)


def names_a_file(folder):
    folder.write_text("notes")
    made(folder)


def changes_the_batch(folder):
    trained(folder)
    made(folder, global_batch=16)


def trains_twice_at_once(folder):
    first = made(folder)
    made(folder)
    del first


def grouped(folder, *rates, **settings):
    model = Net()
    groups = [{"params": [p], "lr": rate} for p, rate in zip(model.heads[0].parameters(), rates, strict=False)]
    rest = [p for p in model.parameters() if all(p is not group["params"][0] for group in groups)]
    optimizer = torch.optim.SGD([*groups, {"params": rest}], lr=0.05)
    return model, optimizer, lockstep.Loop(model, optimizer, Points(), folder=folder, **SIZES, **settings)


def begins_with_groups(folder):
    model, _, loop = grouped(folder, 0.1, 0.2)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))


def goes_on_with_another_rate(folder):
    begins_with_groups(folder)
    try:
        grouped(folder, 0.1, 0.4)
    finally:
        _, optimizer, _ = grouped(folder, 0.1, 0.4, allow_drift=True)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.4, 0.05]


def cycle_of(steps):
    return partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=steps)


def goes_on_with_a_longer_cycle(folder):
    """With allow_drift=True it is the longer one, at the step where the shorter one ended."""
    trained(folder, scheduler=cycle_of(10))
    try:
        made(folder, scheduler=cycle_of(20), epochs=4)
    finally:
        _, scheduler, loop = made(folder, scheduler=cycle_of(20), epochs=4, allow_drift=True)
        assert (loop.done, scheduler.last_epoch, scheduler.total_steps) == (10, 10, 20)
        for step in loop:
            for batch in step:
                step.backward(losses(loop._model, batch))
            scheduler.step()


def goes_on_with_another_scheduler(folder):
    trained(folder, scheduler=partial(lr_scheduler.ExponentialLR, gamma=0.9))
    made(folder, scheduler=partial(lr_scheduler.StepLR, step_size=4))


def goes_on_without_its_scheduler(folder):
    trained(folder, scheduler=partial(lr_scheduler.ExponentialLR, gamma=0.9))
    made(folder)


def goes_on_with_one_scheduler_more(folder):
    trained(folder)
    made(folder, scheduler=partial(lr_scheduler.ExponentialLR, gamma=0.9))


def goes_on_without_its_schedule(folder):
    trained(folder, schedule=halved)
    made(folder)


def goes_on_with_fewer_groups(folder):
    begins_with_groups(folder)
    grouped(folder, 0.1, allow_drift=True)


def goes_on_with_another_model(folder):
    trained(folder)
    lockstep.Loop(
        model := nn.Linear(2, 2),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        Points(),
        folder=folder,
        **SIZES,
    )


MISTAKES = {
    keeps_a_file: "cannot be kept in a checkpoint",
    forgets_backward: "had no step.backward(loss)",
    takes_a_mean: 'reduction="sum"',
    gives_no_sum: "a tensor of shape [8]",
    detaches: "does not depend on any trained weight",
    has_an_infinite_loss: "in step 2: shard 0, samples [54, 7, 16, 41, 40, 12, 50, 3]",
    counts_backwards: "it is how many samples (or tokens) the total is the sum of",
    counts_in_words: "it is how many samples (or tokens) the total is the sum of",
    schedules_by_a_name: "schedule='cosine': it is a function of the step",
    gives_the_class_of_a_scheduler: "such as ExponentialLR(optimizer, 0.9), or a function",
    makes_no_scheduler: "scheduler=None: it is a scheduler of torch",
    runs_its_own_backward: "write step.backward(loss)",
    goes_backward_twice: "once for each micro-batch",
    updates_by_itself: "remove optimizer.step()",
    clips_by_norm: "lockstep.Loop(clip=...)",
    clips_values_after_the_step: "lockstep.Loop(clip=...)",
    leaves_a_step: "was left before the end",
    runs_steps_twice: "each step is run once",
    calls_the_model_between_steps: "in training mode outside",
    forgets_to_train: "model.train()",
    freezes_too_late: "changed inside of `for ... in step`",
    schedules_micro_batches: "once in a step",
    keeps_a_scheduler_to_itself: "scheduler=...",
    gives_a_loader: "loader.dataset",
    gives_a_stream: "map-style",
    leaves_out_a_weight: "freeze them",
    makes_a_layer_late: "is made in the forward pass",
    takes_large_micro_batches: "more than global_batch=24",
    takes_another_number: "precision='fp8'",
    evaluates_less_than_a_sample: "micro_batch=-3: input should be greater",
    names_a_file: "cannot be made a folder (File exists): give lockstep.Loop another folder",
    changes_the_batch: "allow_drift=True",
    trains_twice_at_once: "another folder=...",
    goes_on_with_another_rate: "optim.groups.1",
    goes_on_with_a_longer_cycle: "'total_steps': '20'",
    goes_on_with_another_scheduler: "in the checkpoint, {'kind': 'StepLR'",
    goes_on_without_its_scheduler: "optim.scheduler: {'kind': 'ExponentialLR'",
    goes_on_with_one_scheduler_more: "optim.scheduler: None in the checkpoint, {'kind': 'ExponentialLR'",
    goes_on_without_its_schedule: "optim.schedule: 'a function of the step' in the checkpoint, None now",
    goes_on_with_fewer_groups: "had 3 groups of parameters, and has 2",
    goes_on_with_another_model: "another model",
}

"""A user's file: the CNN with a BatchNorm after its second convolution."""

from torch import nn

from lockstep.models import _cnn as cnn


def build(options, spec):
    network = cnn.build(cnn.Config(kind="cnn"), spec)
    network.features.conv2 = nn.Sequential(network.features.conv2, nn.BatchNorm2d(64))
    if options.get("has_dropout") is False:
        network.apply(lambda module: setattr(module, "p", 0.0))
    return network

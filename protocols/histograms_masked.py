"""tmp"""
from __future__ import annotations
import numpy as np
from vflsec.core.message import Kind
from vflsec.core.protocol import HistogramExchange, FRACTION_BITS
from vflsec.trees.histograms import histogram
import torch

class Masked(HistogramExchange):
    name="histograms-masked"; reference="x"; reveals={"passive":("x",),"active":("x",)}
    def share(self, derivatives, rows, *, step, phase):
        self.d=derivatives
    def sums(self, bins, nodes, n_bins, place):
        C=self.d.shape[1]//2
        s=histogram(bins,nodes,self.d[:,[place.output,C+place.output]],len(place.numbers),n_bins)
        self.note(s,place)
        return s

class Plain(Masked):
    name="histograms-plain"
    def share(self, derivatives, rows, *, step, phase):
        super().share(derivatives, rows, step=step, phase=phase)
        self.active.send(Kind.GRADIENT, {"value": torch.from_numpy(derivatives/2.0**FRACTION_BITS)}, to=self.passive.name, step=step, phase=phase, rows=rows, defended=True)
    def sums(self, bins, nodes, n_bins, place):
        C=self.d.shape[1]//2
        s=histogram(bins,nodes,self.d[:,[place.output,C+place.output]],len(place.numbers),n_bins)
        self.passive.send(Kind.HISTOGRAM, self.learned(s,place), to=self.active.name, step=place.tree, phase=place.phase)
        return s

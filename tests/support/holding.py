"""A file of observers that holds runs at a step, so that what is done to them comes in their midst."""

HOLDING = '''
import pathlib
import time


class Holding:
    """Stays in step 12 of the runs that a file "hold" names, and is slow in those that "slow" names."""

    def notice(self, event):
        if type(event).__name__ == "RunStarted":
            self.name, self.file = event.folder.name, event.folder.parents[2] / "hold"
            self.slow = event.folder.parents[2] / "slow"
        elif type(event).__name__ == "StepDone" and self.slow.exists() and self.name in self.slow.read_text():
            time.sleep(0.1)
        elif type(event).__name__ == "StepDone" and event.step == 12:
            while self.file.exists() and self.name in self.file.read_text():
                time.sleep(0.01)

    def close(self):
        pass


def observers(options):
    return [Holding()]
'''

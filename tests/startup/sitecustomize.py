"""For interpreters that tests start: importing a host makes a million objects that stay."""

import gc

gc.set_threshold(50_000, 20, 20)  # 1.2 s of the 8 that LeRobot takes

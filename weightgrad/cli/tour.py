"""`weightgrad tour`: placeholder"""


def tour() -> None: ...

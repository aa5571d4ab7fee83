"""Says how long a piece of work still takes."""


def time_left(done: int, total: int, seconds: float) -> str:
    """Returns "5 minutes left", if `done` parts of `total` took `seconds`."""
    left = seconds / done * (total - done)
    if left >= 5400:
        return f"{left / 3600:.1f} hours left"
    minutes = round(left / 60)
    return f"{minutes} minute{'s' * (minutes != 1)} left" if minutes else f"{left:.0f} seconds left"

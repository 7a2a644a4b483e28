"""Speed, as ratios: every case is first judged by the reference, then timed beside torch and the device's own ceilings."""

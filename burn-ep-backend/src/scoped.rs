//! Settings of a thread that hold while a closure runs.

use core::cell::Cell;
use std::thread::LocalKey;

/// Runs `f` with `setting` at `value` on this thread and puts the previous value back, also when `f` panics.
pub(crate) fn with<T: Copy + 'static, R>(setting: &'static LocalKey<Cell<T>>, value: T, f: impl FnOnce() -> R) -> R {
    struct Restore<T: Copy + 'static>(&'static LocalKey<Cell<T>>, T);
    impl<T: Copy + 'static> Drop for Restore<T> {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _restore = Restore(setting, setting.replace(value));
    f()
}

//! Stopping after the current step.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// A request to stop, shared between the trainer and whoever asks.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Not requested.
    pub fn new() -> Self {
        Self::default()
    }

    /// Requested by SIGINT and SIGTERM. A second signal ends the process at once, without saving.
    pub fn on_signals() -> Result<Self> {
        let interrupt = Self::new();
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // Order matters: the shutdown acts on the flag as earlier signals left it.
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, interrupt.0.clone())
                .and_then(|_| signal_hook::flag::register(signal, interrupt.0.clone()))
                .map_err(|e| Error::io("signal handler", "register", e))?;
        }
        Ok(interrupt)
    }

    /// Ask the trainer to stop after the current step.
    pub fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// True once asked.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

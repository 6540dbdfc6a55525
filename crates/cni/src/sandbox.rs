//! The container's network namespace, as far as the plugin itself looks into it.

use crate::error::CniError;

/// An interface as the kernel has it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SandboxInterface {
    /// `aa:bb:cc:dd:ee:ff`.
    pub mac: String,
    /// Administratively up.
    pub up: bool,
    /// With prefix length.
    pub addresses: Vec<String>,
}

/// What the plugin asks of a namespace; the kernel, or a test's table.
pub trait Sandbox {
    /// The interface `name` in the namespace at `netns`; `None` when the namespace has none.
    ///
    /// # Errors
    /// Code 5 when the namespace cannot be read.
    fn interface(&self, netns: &str, name: &str) -> Result<Option<SandboxInterface>, CniError>;

    /// Sets the loopback device of the namespace up or down. A namespace that is gone counts as done when setting down.
    ///
    /// # Errors
    /// Code 5 when the kernel refuses.
    fn set_loopback(&self, netns: &str, up: bool) -> Result<(), CniError>;
}

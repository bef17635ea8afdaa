//! The switch for the slow memory delay: a word in the emulator's control page. Memory is populated while it is off,
//! since populating would take a minute otherwise and is not measured.

use std::path::Path;

use super::control_page::{ControlPage, field};
use crate::fault::Fault;

/// Enables the slow memory delay during its lifetime.
#[derive(Debug)]
pub struct Delay {
    page: ControlPage,
}

impl Delay {
    /// Enables the delay.
    pub fn arm(root: &Path) -> Result<Self, Fault> {
        let page = ControlPage::map(root)?;
        page.write(field::ARMED, 1);
        Ok(Self { page })
    }
}

impl Drop for Delay {
    fn drop(&mut self) {
        self.page.write(field::ARMED, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::control_page::tests::machine_with_plugin;
    use super::*;

    #[test]
    fn armed_while_it_lives() {
        let (root, memory) = machine_with_plugin();
        let armed = || std::fs::read(&memory).unwrap()[field::ARMED];
        let delay = Delay::arm(root.path()).unwrap();
        assert_eq!(armed(), 1);
        drop(delay);
        assert_eq!(armed(), 0);
    }
}

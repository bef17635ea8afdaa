//! Plots over time.

use std::fmt::Write;

use super::Page;
use crate::lines::{self, Quantity, SYSTEMS_MAX};
use crate::schema::{RunResult, SystemResult};
use crate::svg::Size;
use crate::text;

impl Page {
    /// Everything that the systems of a result did over time.
    pub(super) fn over_time(&mut self, result: &RunResult) {
        self.performance(result);
        self.hot_share(result);
        self.fast_memory(result);
        self.vms(result);
    }

    fn performance(&mut self, result: &RunResult) {
        let quantity = Quantity::performance(result);
        if !quantity.is_known(&result.systems) {
            return;
        }
        let mut note = format!("In {}.", quantity.unit());
        if result.systems.len() > SYSTEMS_MAX {
            let _ = write!(
                note,
                " The plots show the first {SYSTEMS_MAX} of {} systems; the table shows all.",
                result.systems.len()
            );
        }
        self.section(quantity.title(), &note);
        self.lines(result, quantity, 340.0);
    }

    fn lines(&mut self, result: &RunResult, quantity: Quantity, height: f64) {
        self.plot(|width| lines::plot(result, quantity, Size { width, height }));
    }

    fn hot_share(&mut self, result: &RunResult) {
        let quantity = Quantity::HotShare;
        if quantity.is_known(&result.systems) {
            self.section(quantity.title(), &format!("In {}.", quantity.unit()));
            self.lines(result, quantity, 260.0);
        }
    }

    fn fast_memory(&mut self, result: &RunResult) {
        let quantity = Quantity::FastMemory;
        if quantity.is_known(&result.systems) {
            self.section(quantity.title(), &format!("In {}.", quantity.unit()));
            self.lines(result, quantity, 220.0);
        }
    }

    /// The VMs of each run that had several: a run's picture shows its VMs as another's shows
    /// systems.
    fn vms(&mut self, result: &RunResult) {
        let runs = result.systems.iter().take(SYSTEMS_MAX);
        for run in runs {
            let Some(provisioning) = run.provisioning.as_ref().filter(|p| !p.vms.is_empty()) else {
                continue;
            };
            let name = text::name(&run.name);
            let systems = provisioning.vms.iter().map(|vm| SystemResult {
                name: vm.name.clone(),
                series: vm.series.clone(),
                ..SystemResult::default()
            });
            let vms = RunResult {
                systems: systems.collect(),
                ..result.clone()
            };
            for quantity in [Quantity::Throughput, Quantity::FastMemory] {
                let title = format!("{name}: {} of each VM", quantity.title().to_lowercase());
                self.section(&title, &format!("In {}.", quantity.unit()));
                self.lines(&vms, quantity, 220.0);
            }
        }
    }
}

//! Formats the host's report for people.

use std::fmt::{self, Display, Formatter};

use super::{DamonReport, HostReport, HugetlbReport};

impl HostReport {
    fn write_kvm(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { kvm, .. } = self;
        let ageing = match self.ageing_flushes {
            Some(true) => "KVM's ageing flushes TLBs",
            Some(false) => "KVM's ageing does not flush TLBs",
            None => "ageing unknown",
        };
        writeln!(f, "kernel         {}, {ageing}", known(&self.kernel))?;
        writeln!(
            f,
            "kvm            /dev/kvm {}, {}, two dimensions {}, access bits {}, nested {}",
            yes_no(kvm.device),
            kvm.extension.unwrap_or("no vmx or svm"),
            maybe(kvm.two_dimensions),
            maybe(kvm.access_bits),
            maybe(kvm.nested),
        )?;
        writeln!(
            f,
            "               guest_memfd {}, counters {}",
            maybe(kvm.guest_memfd),
            yes_no(kvm.counters)
        )
    }

    fn write_huge_pages(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "huge pages     transparent {}, of shared memory {}",
            known(&self.thp),
            known(&self.shmem_thp)
        )?;
        for of in &self.hugetlb {
            let HugetlbReport {
                size_kib,
                total,
                free,
            } = of;
            write!(f, "; {total} of {size_kib} KiB reserved, {free} free")?;
        }
        writeln!(f)
    }
}

impl Display for HostReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.write_kvm(f)?;
        let damon = match self.damon {
            DamonReport::Free => "free".into(),
            DamonReport::Taken { kdamonds } => format!("in use ({kdamonds} kdamonds)"),
            DamonReport::Missing => "missing".into(),
            DamonReport::Denied => "permission denied".into(),
        };
        writeln!(f, "damon          {damon}")?;
        self.write_huge_pages(f)?;
        for node in &self.nodes {
            writeln!(f, "{node}")?;
        }
        match &self.tiers {
            Some(tiers) => writeln!(
                f,
                "tiers          fast: node {}, slow: node {} ({})",
                tiers.fast, tiers.slow, tiers.decided_by
            )?,
            None => writeln!(f, "tiers          none")?,
        }
        for advice in &self.advice {
            writeln!(f, "{advice}")?;
        }
        if self.advice.iter().all(|advice| !advice.blocks) {
            writeln!(
                f,
                "VMs can be managed from this host (manage = \"history\")."
            )?;
        }
        Ok(())
    }
}

fn known(value: &Option<String>) -> &str {
    value.as_deref().unwrap_or("unknown")
}

fn maybe(value: Option<bool>) -> &'static str {
    value.map_or("unknown", yes_no)
}

fn yes_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

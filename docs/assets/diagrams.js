// What the theme leaves at mermaid's defaults, readable on light and on dark pages: charts and time lines.
{
  const grey = "#808080", blue = "#5c6bc0"
  const axes = ["LabelColor", "TitleColor", "TickColor", "LineColor"].flatMap(part => [`xAxis${part}`, `yAxis${part}`])
  const xyChart = { ...Object.fromEntries(axes.map(axis => [axis, grey])), backgroundColor: "transparent" }
  const themeVariables = {
    xyChart: { ...xyChart, titleColor: grey, plotColorPalette: blue },
    taskTextOutsideColor: grey, titleColor: grey, textColor: grey,
    critBkgColor: "#c05c5c", critBorderColor: "#c05c5c",
    sectionBkgColor: "transparent", altSectionBkgColor: "transparent",
  }
  const gantt = { useWidth: 640, fontSize: 13, sectionFontSize: 13, barHeight: 26 }
  const initialize = mermaid.initialize
  mermaid.initialize = config => initialize({ ...config, themeVariables, gantt })
}
